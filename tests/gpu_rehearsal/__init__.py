"""A rehearsal of the GPU path on a machine without a GPU: `make test-gpu-rehearsal`.

The engine runs as on an H200, on tensors that say they are on ``cuda:0`` and whose data is in host memory:

    device_tensor.py     the tensors, and what an operator does with them; a mix of devices is an error
    machine.py           what a step may not do: the waits and faults that were seen, with the line that caused each
    host_memory.py       pinned memory, and copies that the host may not look at before it has waited
    cuda_stubs.py        torch.cuda without a driver: devices, events, a clock on which the GPU lags behind the host
    launches.py          Triton's own launch path up to the driver; *_contracts.py check the arguments
    flash_attn_stub.py   the two functions of flash-attn
    ranks.py             tensor parallel ranks as threads, with NCCL's rules for collectives
    planting.py          puts a fault into a line of the product

It needs torch's CUDA build, because the CPU build refuses to index a tensor on ``cuda:0``. It does not show that a
kernel computes what it should (Triton's interpreter does), nor races between streams, nor anything about speed.
"""
