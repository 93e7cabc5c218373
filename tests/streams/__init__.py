"""What a GPU would have to wait for, proven without one: streams, events and memory of a step, recorded and analysed.

[Note: Recorded, then proven] The CUDA path of the engine runs here as it is: `harness.fsdp.comm.device.cuda` is a
recorder in place of `torch.cuda` (`cuda`), process groups order their collectives as NCCL's do and move the data over
gloo (`group`), and a dispatch mode notes of every operation which bytes it reads and writes (`recorder`). All work is
done at once on the host, so numbers are right whatever the engine forgot to wait for; what it forgot is found in the
*log* (`log`), afterwards and in every order that a device may choose (`races`): an access is safe only if a chain of
events, waits and program order leads from the one before to it. One log answers several questions: what would race if
an edge were left out (`edges`), and what takes how long (`cost`).

[Note: Worst allocator] The caching allocator hands a freed block to the next allocation on the stream it came from, at
once. Here every block that was freed on a stream goes to the very next allocation on that stream, whatever its size,
and whatever was allocated was freed by its last owner just before. So a use on another stream must be ordered after the
stream at the allocation, and before the stream at the next allocation after the free.
"""
