// openai for Node: usage is `node with_openai.mjs BASE_URL`, in a directory where `npm install openai` has run.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.env.OPENAI_API_KEY, maxRetries: 0 });
const asked = { model: "pagoda-demo", temperature: 0 };
const question = [{ role: "user", content: "What is a KV cache?" }];
const city = { type: "string", enum: ["Oslo", "Lima"] };
const parameters = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

const answer = (await client.chat.completions.create({ ...asked, messages: question })).choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, messages: question, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}

const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const runner = client.chat.completions.stream({
  ...asked,
  messages,
  tools,
  tool_choice: "required",
  parallel_tool_calls: false,
});
const calling = (await runner.finalChatCompletion()).choices[0].message;
const cities = calling.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
messages.push(calling);
calling.tool_calls.forEach((call, index) =>
  messages.push({ role: "tool", tool_call_id: call.id, content: `It rains in ${cities[index]}.` }),
);
const replied = await client.chat.completions.create({ ...asked, messages, tools, tool_choice: "none" });
const final = replied.choices[0].message.content;

const response = await client.responses.create({ ...asked, input: "What is a KV cache?" });
console.log(JSON.stringify({ answer, streamed, cities, final, response: response.output_text }));
