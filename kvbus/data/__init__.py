"""Data process of an agent: NIXL, copies, staging slots, mapped KV memory, and CUDA.

messages    requests of the control process, replies of the data process
channel     socket between them
client      control process's side; child: a data process as its child
__main__    the data process; loop: its main thread
server      memories, plans, peers, slots; definitions: requests that wait for them
jobs        READs (reads, scheduler, slicing), copies (copies, copiers, digests)
nixl        interface of NIXL; nixl_agent: its only import; metadata: checks of it
"""
