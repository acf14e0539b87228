"""The comparisons: Gradpost with its peers, which do the same work, and with itself under other settings or work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.placement import model_parameters

from .work import Work

MILLION = 1_000_000
RESNET50 = tuple(spec.num_elements for spec in model_parameters("ResNet-50"))

RAW, RPC_TCP, RPC, GLOO, RAY = "raw_sockets", "torch_rpc_tcp", "torch_rpc", "gloo", "ray"
BARE = "bare_exchange"  # our HTTP/2 with nothing above it
ALL = (RAW, RPC_TCP, RPC, GLOO, RAY)
# With the malloc settings of our services: freed memory is kept, which avoids page faults.
RPC_TCP_KEEPING, RPC_KEEPING = "torch_rpc_tcp_keeping", "torch_rpc_keeping"

WORK_100MB = Work((25 * MILLION,))
WORK_100MB_BF16 = Work((25 * MILLION,), rounding=2**-8)


@dataclass(frozen=True)
class Variant:
    """Gradpost with these settings of the services."""

    work: Work
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_secure: bool = False  # over TLS


@dataclass(frozen=True)
class Case:
    """One comparison of Gradpost, the peers that do the same work, and variants that may do other work."""

    name: str
    text: str
    ours: Variant
    num_rounds: int  # of a repetition
    peers: tuple[str, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)
    quick_peers: tuple[str, ...] | None = None  # with --quick; None: the whole case is left out


BFLOAT16 = {"push_type": "bfloat16", "pull_type": "bfloat16"}


def _scaled(num_trainers: int, num_servers: int) -> Variant:
    return Variant(Work((5 * MILLION // 2,), num_trainers=num_trainers, num_servers=num_servers))


def _asynchronous(num_trainers: int) -> Variant:
    return Variant(Work((25 * MILLION,), num_trainers=num_trainers, is_exact=False), {"mode": "async"})


CASES = (
    Case(
        "sync_100mb_fp32", "25 M parameters in one tensor, SGD",
        Variant(WORK_100MB), num_rounds=5, peers=(*ALL, RPC_TCP_KEEPING), quick_peers=ALL,
    ),
    Case(
        "sync_100mb_bf16", "the same in bfloat16 on the wire, both ways",
        Variant(WORK_100MB_BF16, BFLOAT16), num_rounds=5, peers=(GLOO,),
        variants={"sync_100mb_fp32": Variant(WORK_100MB)}, quick_peers=(GLOO,),
    ),
    Case(
        "resnet50", f"the {len(RESNET50)} tensors of ResNet-50, {sum(RESNET50) / MILLION:.1f} M parameters, SGD",
        Variant(Work(RESNET50)), num_rounds=5, peers=(RPC_TCP, GLOO),
        variants={"sync_100mb_fp32": Variant(WORK_100MB)}, quick_peers=(),
    ),
    Case(
        "tiny", "10,000 parameters in 8 tensors, SGD",
        Variant(Work((1250,) * 8)), num_rounds=100, peers=(*ALL, BARE), quick_peers=(RPC_TCP,),
    ),
    Case(
        "latency", "1,000 parameters in one tensor, SGD",
        Variant(Work((1000,), num_trainers=1, num_servers=1)), num_rounds=200, peers=(RAW, BARE, RPC_TCP),
        quick_peers=(RPC_TCP,),
    ),
    Case(
        "many_tensors", "1,000 tensors of 64 elements, SGD",
        Variant(Work((64,) * 1000)), num_rounds=20, peers=(RPC_TCP,), quick_peers=(),
        variants={"async": Variant(Work((64,) * 1000, is_exact=False), {"mode": "async"})},
    ),
    Case(
        "sync_100mb_adam", "25 M parameters in one tensor, Adam",
        Variant(Work((25 * MILLION,), optimizer="adam")), num_rounds=5,
        variants={"sync_100mb_fp32": Variant(WORK_100MB)}, quick_peers=(),
    ),
    Case(
        "async", "25 M parameters in one tensor, SGD, asynchronous: each trainer takes its steps alone",
        _asynchronous(2), num_rounds=5, variants={"async_4_trainers": _asynchronous(4)},
    ),
    Case(
        "scale_trainers", "10 MB for each of 16 trainers, SGD, beside fewer trainers",
        _scaled(16, 2), num_rounds=5, variants={f"{n}_trainers": _scaled(n, 2) for n in (1, 2, 4, 8)},
    ),
    Case(
        "scale_pservers", "10 MB for each of 4 trainers, SGD, beside other numbers of pservers",
        _scaled(4, 2), num_rounds=5, variants={f"{m}_pservers": _scaled(4, m) for m in (1, 4)},
    ),
    Case(
        "large", "250 M parameters in ten tensors (1 GB), SGD",
        Variant(Work((25 * MILLION,) * 10)), num_rounds=2, peers=(RPC_TCP,),
    ),
    Case(
        "transports", "25 M parameters in one tensor, SGD, over HTTP/2, beside other ways",
        Variant(WORK_100MB), num_rounds=5,
        variants={
            "http1": Variant(WORK_100MB, {"http2": False}),
            "tls": Variant(WORK_100MB, is_secure=True),
        },
    ),
    Case(
        "wire_types", "25 M parameters in one tensor, SGD, as they are, beside fewer bytes",
        Variant(WORK_100MB), num_rounds=5,
        variants={
            "bfloat16": Variant(WORK_100MB_BF16, BFLOAT16),
            "float16": Variant(WORK_100MB_BF16, {"push_type": "float16", "pull_type": "float16"}),
            "int8_push": Variant(WORK_100MB, {"push_type": "int8"}),
            "int8": Variant(Work((25 * MILLION,), rounding=1e-2), {"push_type": "int8", "pull_type": "int8"}),
            "topk_push": Variant(Work((25 * MILLION,), is_exact=False), {"push_type": "topk"}),
        },
    ),
    Case(
        "local_transport", "25 M parameters in one tensor, SGD, over Unix sockets, beside HTTP/2 over TCP",
        Variant(WORK_100MB, {"local_transport": True}), num_rounds=5, peers=(RPC, RPC_KEEPING),
        variants={"sync_100mb_fp32": Variant(WORK_100MB)},
    ),
    Case(
        "durability", "25 M parameters in one tensor, SGD, nothing kept, beside a log",
        Variant(WORK_100MB), num_rounds=5,
        variants={name: Variant(WORK_100MB, {"durability": name}) for name in ("log", "fsync")},
    ),
)  # fmt: skip
