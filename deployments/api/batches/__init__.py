"""The Files and the Batch API of OpenAI: uploads, and batches of requests that run when there is nothing else to do."""
