"""Findings of machines that Hypothesis draws, good ones and bad ones, a strategy for each check."""

from collections.abc import Callable, Iterable

from hypothesis import strategies as st
from packaging.requirements import Requirement

from kvbus.doctor import cuda, host, nixl, versions
from kvbus.doctor.agents import AgentFacts, Bind, agent_findings
from kvbus.doctor.finding import Finding
from kvbus.doctor.nixl import ReadFacts, UcxChoice
from kvbus.doctor.process import Gpu, GpuList, NixlList

GIB = 1 << 30
REQUIRED = (Requirement("nixl>=1.5.1,<2"), Requirement("torch>=2.6"))
GPUS = GpuList("13.0", (Gpu(uuid="GPU-1", name="H200", memory_bytes=139 << 30),))

errors = st.sampled_from(["", "Operation not permitted"])
sizes = st.integers(0, 1 << 40)
versions_of_packages = st.sampled_from(["1.4", "1.5.1", "2.0", "2.13.0+cpu", "3.11.7"])


def one(make: Callable[..., Finding], *args: object, **keys: object) -> st.SearchStrategy[object]:
    """Findings, as lists of one, of drawn values."""
    return st.builds(lambda *a, **k: [make(*a, **k)], *args, **keys)


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
backends = st.dictionaries(
    st.sampled_from(["UCX", "GDS", "POSIX"]), st.sampled_from([(), ("DRAM_SEG",)])
)
gpus = st.sampled_from([GpuList("", ()), GPUS])
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
    interfaces=st.just(("eth0", "eth1")),
    interfaces_error=errors,
    down=st.sampled_from([(), ("eth1",), ("eth0", "eth1")]),
    server_key=st.just("k"),
    trusted=st.sampled_from([None, frozenset(), frozenset({"decode"})]),
)

FINDINGS: list[st.SearchStrategy[Iterable[Finding]]] = [
    one(
        versions.python_finding,
        versions_of_packages,
        st.sampled_from(["", ">=3.11"]),
        st.just("Linux"),
    ),
    st.builds(
        versions.package_findings,
        st.sampled_from([(), REQUIRED]),
        st.dictionaries(st.sampled_from(["nixl", "torch"]), versions_of_packages),
    ),
    one(host.segment_finding, errors),
    one(host.room_finding, sizes, total_bytes=sizes, group_limit_bytes=st.none() | sizes),
    one(host.folder_finding, st.none() | sizes, st.none() | sizes),
    one(
        host.huge_page_finding,
        st.integers(0, 100),
        st.sampled_from([0, 2 << 20]),
        st.sampled_from(["", "never", "advise", "within_size", "always"]),
    ),
    one(host.core_finding, st.integers(1, 8), st.none() | st.floats(0.1, 8)),
    one(host.kernel_finding, compiled=st.booleans()),
    one(host.open_files_finding, st.none() | st.integers(0, 1 << 20)),
    one(
        host.locked_memory_finding,
        st.none() | sizes,
        may_lock=st.booleans(),
        rdma_devices=st.sampled_from([(), ("mlx5_0",)]),
    ),
    one(host.file_size_finding, st.none() | sizes),
    one(
        host.reading_finding,
        errors,
        ptrace_scope=st.none() | st.integers(0, 3),
        may_trace=st.booleans(),
    ),
    one(
        nixl.installed_finding,
        errors,
        st.builds(NixlList, st.sampled_from(["", "1.5.1"]), backends),
        st.sampled_from(["", "1.23.0"]),
    ),
    one(nixl.backends_finding, backends, st.sampled_from([(), ("cma", "tcp")])),
    st.builds(nixl.read_findings, reads),
    one(cuda.no_gpu_finding, st.sampled_from(["", "2.13.0"])),
    one(
        cuda.gpus_finding,
        gpus,
        errors,
        num_devices=st.integers(1, 2),
        driver=st.sampled_from(["", "570.86.15"]),
        torch_version=st.sampled_from(["", "2.13.0"]),
    ),
    one(cuda.ipc_finding, errors),
    one(
        cuda.allocator_finding,
        st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:64"]),
    ),
    st.builds(lambda agent: agent_findings([agent], available_bytes=GIB), agents),
]
