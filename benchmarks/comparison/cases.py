"""The comparisons: Gradpost with its peers, which do the same work, and with itself under other settings or work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .work import NUM_BATCHES, WIDTH, Work

MILLION = 1_000_000


def count_resnet50() -> Iterator[int]:
    """Yield the elements of each tensor of torchvision's resnet50.

    Convolutions have no bias and are followed by a batch norm of a weight and a bias.
    """
    yield from (3 * 64 * 7 * 7, 64, 64)
    num_inputs = 64
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        num_outputs = 4 * width
        for block in range(depth):
            yield from (num_inputs * width, width, width)
            yield from (width * width * 3 * 3, width, width)
            yield from (width * num_outputs, num_outputs, num_outputs)
            if block == 0:  # the shortcut is projected
                yield from (num_inputs * num_outputs, num_outputs, num_outputs)
            num_inputs = num_outputs
    yield from (num_inputs * 1000, 1000)


RESNET50 = (*count_resnet50(),)

RAW, RPC_TCP, RPC, GLOO, RAY = "raw_sockets", "torch_rpc_tcp", "torch_rpc", "gloo", "ray"
DDP = "gloo_ddp"  # overlaps with the backward pass
GROWTH = "embeddings_growth"  # the case that is also drawn
BARE = "bare_exchange"  # our HTTP/2 with nothing above it
ALL = (RAW, RPC_TCP, RPC, GLOO, RAY)
# With the malloc settings of our services: freed memory is kept, which avoids page faults.
RPC_TCP_KEEPING, RPC_KEEPING = "torch_rpc_tcp_keeping", "torch_rpc_keeping"

WORK_100MB = Work((25 * MILLION,))
WORK_100MB_BF16 = Work((25 * MILLION,), rounding=2**-8)


@dataclass(frozen=True)
class Variant:
    """Gradpost with these settings of the services and of the trainers."""

    work: Work
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_secure: bool = False  # over TLS
    trainer_settings: Mapping[str, Any] = field(default_factory=dict)


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

    def resize(self, **numbers: int) -> Case:
        """Return this case with these numbers of trainers and servers."""

        def resized(variant: Variant) -> Variant:
            return replace(variant, work=replace(variant.work, **numbers))

        variants = {name: resized(variant) for name, variant in self.variants.items()}
        return replace(self, ours=resized(self.ours), variants=variants)

    def count_machines(self) -> int:
        """Return the largest number of servers and trainers."""
        works = [variant.work for variant in (self.ours, *self.variants.values())]
        return max(work.num_servers + work.num_trainers for work in works)


BFLOAT16 = {"push_type": "bfloat16", "pull_type": "bfloat16"}


ROWS = {"50k": MILLION // 20, "500k": MILLION // 2, "5m": 5 * MILLION}  # of an embedding table


def _scaled(num_trainers: int, num_servers: int) -> Variant:
    return Variant(Work((5 * MILLION // 2,), num_trainers=num_trainers, num_servers=num_servers))


def _computing(elements: tuple[int, ...]) -> Variant:
    return Variant(Work(elements, forward_seconds=0.2, backward_seconds=0.4, num_warm_up=2))


def _asynchronous(num_trainers: int) -> Variant:
    return Variant(Work((25 * MILLION,), num_trainers=num_trainers, is_exact=False), {"mode": "async"})


def _embeddings(num_rows: int, **settings: Any) -> Variant:
    work = Work((num_rows * WIDTH,) * 2, is_exact=False, batch=4096, num_warm_up=NUM_BATCHES)
    return Variant(work, {"max_body_bytes": 1 << 30, **settings})


LAYERS_100MB, LAYERS_RESNET50 = _computing((MILLION,) * 25), _computing(RESNET50)
OVERLAP = {"overlap": True, "overlap_pulls": True}

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
        Variant(Work(RESNET50)), num_rounds=5, peers=(RPC_TCP, RPC_TCP_KEEPING, GLOO),
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
    Case(
        "overlap_100mb", "25 layers of 1 M parameters, SGD, a forward pass of 0.2 s and a backward pass of 0.4 s",
        LAYERS_100MB, num_rounds=2, peers=(RPC_TCP_KEEPING, GLOO),
        variants={"overlap_and_pulls": replace(LAYERS_100MB, trainer_settings=OVERLAP)},
    ),
    Case(
        "overlap_resnet50", f"the {len(RESNET50)} tensors of ResNet-50, SGD, the same passes",
        LAYERS_RESNET50, num_rounds=2, peers=(RPC_TCP_KEEPING, GLOO, DDP),
        variants={"overlap_and_pulls": replace(LAYERS_RESNET50, trainer_settings=OVERLAP)},
    ),
    Case(
        "embeddings", "two towers with tables of 500,000 rows of 32, 4,096 Zipf ids of each in a batch, SGD",
        _embeddings(500_000), num_rounds=2 * NUM_BATCHES, peers=(DDP,),
        variants={
            "log": _embeddings(500_000, durability="log"), "bfloat16": _embeddings(500_000, **BFLOAT16),
        },
    ),
    Case(
        GROWTH, "the same with tables of 500,000 rows, beside other numbers of rows",
        _embeddings(500_000), num_rounds=2 * NUM_BATCHES,
        variants={
            "50k": _embeddings(50_000), "5m": _embeddings(5 * MILLION),
            **{f"{name}_log": _embeddings(num_rows, durability="log") for name, num_rows in ROWS.items()},
        },
    ),
)  # fmt: skip
