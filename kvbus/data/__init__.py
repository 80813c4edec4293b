"""The data process of an agent: NIXL, copies, staging slots, mapped KV memory, and CUDA.

messages    requests of the control process, replies of the data process
channel     the socket between them
client      the control process's side: start, restart, jobs
child       a data process as a child of the control process
__main__    the data process; loop: its main thread
server      memories, plans, peers and slots; definitions: requests that wait for them
jobs        READs (reads, scheduler, slicing) and copies (copies, copiers, digests)
nixl        the interface of NIXL; nixl_agent: the only import of it; metadata: that of peers
"""
