"""The rows of the table: what is sent to whom, which figure counts, and what it must reach.

Rows of one scene share their servers, which are up at once while it lasts. A row is ``Beside`` (the same load to ours
and to the peer, in turns), ``Sweep`` (one load at several concurrencies, to all of a scene's servers, for the plots) or
``Program`` (another program of this directory, whose lines of JSON with a goal become the table's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from goals import Figure, Goal, at_least
from load import Length


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a server is sent in one run."""

    num_requests: int
    input_len: Length
    output_len: Length
    concurrency: int = 0  # closed loop; 0: an open one
    share_of_capacity: float = 0.0  # open loop: of the peer's, measured first with the same lengths
    shared_prefix_len: int = 0  # tokens at the head of all prompts of a run, new in every run
    prefix_is_warm: bool = False  # one request with the prefix went before, uncounted

    def quick(self) -> Load:
        """Return less of the same, to see that it works."""
        if self.share_of_capacity:
            return replace(self, num_requests=min(self.num_requests, 12), output_len=Length(8, 32))
        low, high = self.output_len.low, self.output_len.high
        return replace(
            self,
            num_requests=min(self.num_requests, max(self.concurrency, 2)),
            output_len=Length(max(2, low // 4), max(2, high // 4)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The same load to ours and to a peer, in turns."""

    bench: str
    what: str
    load: Load
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One load at several concurrencies, to every server of the scene. For a plot; it has no goal."""

    bench: str
    what: str
    load: Load
    concurrencies: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Another program of this directory. It has the machine for itself, and says itself what its figures must reach."""

    bench: str
    what: str
    words: tuple[str, ...]  # {vllm} is the peer's environment
    quick_words: tuple[str, ...] = ()
    timeout_s: float = 600.0


Row = Beside | Sweep | Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Servers that are up at once, ours first, and what is measured of them."""

    servers: tuple[str, ...]  # names in servers.RECIPES
    rows: tuple[Row, ...]


def tokens_per_s(goal: Goal | None) -> tuple[Figure, ...]:
    return (Figure(path="output_tokens_per_s", unit="tokens/s", goal=goal),)


def closed(concurrency: int, num_requests: int, input_len: int, output_len: int) -> Load:
    return Load(
        concurrency=concurrency,
        num_requests=num_requests,
        input_len=Length(input_len, input_len),
        output_len=Length(output_len, output_len),
    )


def latency(of: str, percent: int) -> Figure:
    return Figure(
        suffix=f"{of.upper()} p{percent}",
        path=f"{of}_s/p{percent}",
        unit="ms",
        scale=1000.0,
        better="less",
        goal=at_least(1.0),
    )


DECODE_32 = closed(32, 32, 128, 128)
DECODE_8 = closed(8, 8, 128, 128)
DECODE_1 = closed(1, 3, 128, 128)
MIXED = Load(num_requests=96, input_len=Length(32, 512), output_len=Length(16, 256), share_of_capacity=0.7)
PREFIX = Load(
    concurrency=32,
    num_requests=32,
    shared_prefix_len=512,
    input_len=Length(32, 32),
    output_len=Length(64, 64),
)

BESIDE_VLLM = Scene(
    servers=("ours", "vllm"),
    rows=(
        Beside(
            bench="decode-32",
            what="32 requests at once, 128 -> 128 tokens",
            load=DECODE_32,
            figures=tokens_per_s(at_least(1.6)),
        ),
        Beside(
            bench="decode-8",
            what="8 requests at once, 128 -> 128 tokens",
            load=DECODE_8,
            figures=tokens_per_s(at_least(1.7)),
        ),
        Beside(
            bench="decode-1",
            what="one request after the other, 128 -> 128 tokens",
            load=DECODE_1,
            figures=tokens_per_s(at_least(1.6)),
        ),
        Beside(
            bench="prefill-8x1024",
            what="8 requests at once, 1024 -> 16 tokens",
            load=closed(8, 8, 1024, 16),
            figures=(Figure(path="prompt_tokens_per_s", unit="tokens/s", goal=at_least(2.0)),),
        ),
        Beside(
            bench="prefix-512",
            what="32 requests at once that begin with the same 512 tokens, which nobody has seen; 32 more each -> 64",
            load=PREFIX,
            figures=tokens_per_s(at_least(1.5)),
        ),
        Beside(
            bench="prefix-512-warm",
            what="the same after one request with these 512 tokens",
            load=replace(PREFIX, prefix_is_warm=True),
            figures=tokens_per_s(at_least(1.5)),
        ),
        Beside(
            bench="open-loop",
            what="Poisson arrivals at 70 % of what vLLM can do, 32..512 -> 16..256 tokens",
            load=MIXED,
            figures=(latency("ttft", 50), latency("ttft", 99), latency("itl", 50), latency("itl", 99)),
        ),
        Sweep(
            bench="concurrency",
            what="tokens/s at 1, 2, 4, 8, 16 and 32 requests at once, 128 -> 64 tokens",
            load=closed(1, 1, 128, 64),
            concurrencies=(1, 2, 4, 8, 16, 32),
        ),
    ),
)


def beside_tuned(row: Row) -> Beside:
    """Return a row against the tuned vLLM, without its goals."""
    assert isinstance(row, Beside)
    figures = tuple(replace(figure, goal=None) for figure in row.figures)
    return replace(row, bench=f"{row.bench}-tuned", what=f"{row.what}, vLLM tuned", figures=figures)


# The goals are against vLLM as it starts. How far ours is from it with all that its manual and log advise, too:
TUNED_ROWS = ("decode-32", "decode-8", "decode-1", "prefill-8x1024")
BESIDE_TUNED_VLLM = Scene(
    servers=("ours", "vllm-tuned"),
    rows=tuple(beside_tuned(row) for row in BESIDE_VLLM.rows if row.bench in TUNED_ROWS),
)
IN_FLOAT32 = Scene(
    servers=("ours-float32", "vllm-float32"),
    rows=(
        Beside(
            bench="decode-32-float32",
            what="32 requests at once, 128 -> 128 tokens, float32",
            load=DECODE_32,
            figures=tokens_per_s(at_least(1.6)),
        ),
    ),
)
INT8_BESIDE_LLAMA = Scene(
    servers=("ours-int8", "llama"),
    rows=(
        Beside(
            bench="decode-1-int8",
            what="one request after the other, 128 -> 128, --quantization int8 beside llama.cpp Q4_1",
            load=DECODE_1,
            figures=tokens_per_s(at_least(1.0)),
        ),
    ),
)
Q4_BESIDE_LLAMA = Scene(
    servers=("ours-q4", "llama"),
    rows=(
        Beside(
            bench="decode-1-q4",
            what="one request after the other, 128 -> 128, the Q4_1 file in both",
            load=DECODE_1,
            figures=tokens_per_s(at_least(1.0)),
        ),
        Sweep(
            bench="concurrency-q4",
            what="tokens/s at 1, 2, 4, 8, 16 and 32 requests at once, 128 -> 64 tokens, the Q4_1 file in both",
            load=closed(1, 1, 128, 64),
            concurrencies=(1, 2, 4, 8, 16, 32),
        ),
    ),
)
ALONE = Scene(
    servers=(),
    rows=(
        Program(
            bench="start",
            what="from exec to the first token, the model in the cache",
            words=("start.py",),
            quick_words=("start.py", "--runs", "1", "--first-time-runs", "0"),
        ),
        Program(
            bench="steps",
            what="host cost of a steady step and bytes of its delta, beside vLLM's scheduler and message queue",
            words=("steps.py", "--rows", "16,64,256", "--peer", "{vllm}", "--readers", "0"),
            quick_words=("steps.py", "--rows", "16", "--peer", "{vllm}", "--readers", "0", "--pairs", "1"),
        ),
        Program(
            bench="steps-long",
            what="the same of ours alone, contexts up to 32 000 tokens, and with 10 and 1 000 requests waiting",
            words=("steps.py", "--rows", "256", "--contexts", "128,32000", "--readers", "0"),
            quick_words=("steps.py", "--rows", "16", "--contexts", "128,4096", "--readers", "0", "--steps", "100"),
        ),
        Program(
            bench="memory",
            what="resident memory of rank and control plane over 20 000 requests of 16 -> 4, then 1 000 live at once",
            words=("memory.py",),
            quick_words=("memory.py", "--num-requests", "1000", "--num-live", "200"),
        ),
        Program(
            bench="idle",
            what="how long a device that takes 5 or 10 ms a step waits for the server, with 256 streams",
            words=("idle.py",),
            quick_words=("idle.py", "--window-s", "3"),
        ),
    ),
)
SCENES: tuple[Scene, ...] = (BESIDE_VLLM, BESIDE_TUNED_VLLM, IN_FLOAT32, INT8_BESIDE_LLAMA, Q4_BESIDE_LLAMA, ALONE)


def all_rows(scenes: Sequence[Scene] = SCENES) -> dict[str, Row]:
    """Return every row by its name."""
    return {row.bench: row for scene in scenes for row in scene.rows}


def chosen(names: Sequence[str], scenes: Sequence[Scene] = SCENES) -> list[Scene]:
    """Return the scenes with only the rows that were asked for; all where none was.

    Raises ``ValueError`` for a name that no row has.
    """
    if unknown := sorted(set(names) - all_rows(scenes).keys()):
        raise ValueError(f"no row is called {', '.join(unknown)}; there are {', '.join(all_rows(scenes))}")
    kept = [
        replace(scene, rows=tuple(row for row in scene.rows if not names or row.bench in names)) for scene in scenes
    ]
    return [scene for scene in kept if scene.rows]
