"""Machines that Hypothesis draws, good ones and bad ones, and good ones to start from."""

from hypothesis import strategies as st
from packaging.requirements import Requirement

from kvbus.doctor.check.agents import AgentFacts, Bind
from kvbus.doctor.check.cuda import CudaFacts, Gpu
from kvbus.doctor.check.host import LimitFacts, MemoryFacts, ProcessFacts
from kvbus.doctor.check.nixl import NixlFacts, ReadFacts, UcxChoice
from kvbus.doctor.check.versions import VersionFacts

GOOD_MEMORY = MemoryFacts(
    total_bytes=64 << 30,
    available_bytes=32 << 30,
    group_limit_bytes=None,
    folder_bytes=32 << 30,
    folder_free_bytes=32 << 30,
    segment_error="",
    huge_page_bytes=2 << 20,
    num_free_huge_pages=0,
    shmem_huge="within_size",
    num_cores=16,
    cpu_quota=None,
)
GOOD_LIMITS = LimitFacts(
    open_files=65536, locked_bytes=None, file_bytes=None, may_lock=False, rdma_devices=()
)
GOOD_PROCESSES = ProcessFacts(error="", ptrace_scope=1, may_trace=False)
GOOD_NIXL = NixlFacts(
    error="",
    nixl_version="1.5.1",
    ucx_version="1.23.0",
    backends={"UCX": ("DRAM_SEG", "VRAM_SEG"), "GDS": ()},
    ucx_transports=("cma", "tcp"),
)
GOOD_CUDA = CudaFacts(
    num_devices=1,
    driver="570.86.15",
    torch_version="2.13.0",
    cuda_version="13.0",
    gpus=(Gpu(uuid="GPU-1", name="H200", memory_bytes=139 << 30),),
    survey_error="",
    ipc_error="",
    allocator="",
)
GOOD_VERSIONS = VersionFacts(
    system="Linux 6.1 x86_64",
    python="3.11.7",
    python_bounds=">=3.11",
    requirements=(Requirement("nixl>=1.5.1,<2"), Requirement("torch>=2.6")),
    installed={"nixl": "1.5.1", "torch": "2.13.0+cpu"},
)

errors = st.sampled_from(["", "Operation not permitted"])
sizes = st.integers(0, 1 << 40)
versions = st.sampled_from(["1.4", "1.5.1", "2.0", "2.13.0+cpu", "3.11.7"])

memories = st.builds(
    MemoryFacts,
    total_bytes=sizes,
    available_bytes=sizes,
    group_limit_bytes=st.none() | sizes,
    folder_bytes=st.none() | sizes,
    folder_free_bytes=st.none() | sizes,
    segment_error=errors,
    huge_page_bytes=st.sampled_from([0, 2 << 20]),
    num_free_huge_pages=st.integers(0, 100),
    shmem_huge=st.sampled_from(["", "never", "advise", "within_size", "always"]),
    num_cores=st.integers(1, 8),
    cpu_quota=st.none() | st.floats(0.1, 8),
)
limits = st.builds(
    LimitFacts,
    open_files=st.none() | st.integers(0, 1 << 20),
    locked_bytes=st.none() | sizes,
    file_bytes=st.none() | sizes,
    may_lock=st.booleans(),
    rdma_devices=st.sampled_from([(), ("mlx5_0",)]),
)
processes = st.builds(
    ProcessFacts,
    error=errors,
    ptrace_scope=st.none() | st.integers(0, 3),
    may_trace=st.booleans(),
)
nixls = st.builds(
    NixlFacts,
    error=errors,
    nixl_version=st.sampled_from(["", "1.5.1"]),
    ucx_version=st.sampled_from(["", "1.23.0"]),
    backends=st.dictionaries(
        st.sampled_from(["UCX", "GDS", "POSIX"]), st.sampled_from([(), ("DRAM_SEG",)])
    ),
    ucx_transports=st.sampled_from([(), ("cma", "tcp")]),
)


def read_of(way: UcxChoice) -> st.SearchStrategy[ReadFacts]:
    wires = st.sampled_from(["", "cma/memory", "tcp/lo"])
    works = st.builds(
        ReadFacts,
        way=st.just(way),
        ucx_tls=st.sampled_from(["", "tcp"]),
        bytes_per_s=st.floats(1.0, 1e12),
        wire=wires,
        error=st.just(""),
    )
    fails = st.builds(
        ReadFacts,
        way=st.just(way),
        ucx_tls=st.sampled_from(["", "tcp"]),
        bytes_per_s=st.none(),
        wire=st.just(""),
        error=st.just("no answer within 8 s"),
    )
    return works | fails


reads = st.sets(st.sampled_from(list(UcxChoice))).flatmap(
    lambda ways: st.tuples(*(read_of(way) for way in UcxChoice if way in ways))
)
cudas = st.builds(
    CudaFacts,
    num_devices=st.integers(0, 2),
    driver=st.sampled_from(["", "570.86.15"]),
    torch_version=st.sampled_from(["", "2.13.0"]),
    cuda_version=st.sampled_from(["", "13.0"]),
    gpus=st.sampled_from([(), GOOD_CUDA.gpus]),
    survey_error=errors,
    ipc_error=errors,
    allocator=st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:64"]),
)
version_facts = st.builds(
    VersionFacts,
    system=st.just("Linux"),
    python=versions,
    python_bounds=st.sampled_from(["", ">=3.11"]),
    requirements=st.sampled_from([(), GOOD_VERSIONS.requirements]),
    installed=st.dictionaries(st.sampled_from(["nixl", "torch"]), versions),
)
binds = st.builds(
    Bind,
    key=st.sampled_from(["peer_bind", "events_bind"]),
    address=st.sampled_from(["tcp://127.0.0.1:7701", "tcp://*:0", "127.0.0.1:9100"]),
    error=errors,
    held_by=st.sampled_from(["", "one", "two"]),
)
agents = st.builds(
    AgentFacts,
    source=st.just("a.toml"),
    agent_id=st.sampled_from(["one", "two"]),
    binds=st.lists(binds, max_size=2, unique_by=lambda bind: bind.key).map(tuple),
    folder=st.just("/run/kvbus"),
    folder_error=errors,
    staging_bytes=sizes,
)
