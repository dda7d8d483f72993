"""Pictures of results: throughput against n, latency against request rate, each with a baseline beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.benchmarks.results import Result
from vllm.exceptions import BadRequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"this": "#0b6e99", "baseline": "#9a9a9a"}


def draw(made: Sequence[Result], path: str | Path, baseline: Sequence[Result] = ()) -> None:
    """Draw results of one kind; the file's suffix says the format.

    Offline results: output tokens per second over n. Served ones: TTFT, TPOT and end-to-end latency over the request
    rate. Raises BadRequestError for kinds that are mixed or have no picture, and where matplotlib is missing.
    """
    kinds = {str(result.get("benchmark")) for result in (*made, *baseline)}
    if not made:
        raise BadRequestError("no result to draw")
    if len(kinds) != 1:
        raise BadRequestError(f"one picture is of one kind of result, not of {', '.join(sorted(kinds))}")
    (kind,) = kinds
    panels = {
        "throughput": [("n", "completions per prompt (n)", "output_throughput", "output tokens/s")],
        "latency": [("n", "completions per prompt (n)", "avg_latency", "mean latency of a batch (s)")],
        "serve": [
            ("request_rate", "request rate (1/s)", "median_ttft_ms", "time to first token (ms)"),
            ("request_rate", "request rate (1/s)", "median_tpot_ms", "time per output token (ms)"),
            ("request_rate", "request rate (1/s)", "median_e2el_ms", "end to end (ms)"),
        ],
    }.get(kind)
    if panels is None:
        raise BadRequestError(f"no picture is made of {kind!r} results")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequestError("pictures need matplotlib: pip install 'vllm[bench]'") from None

    figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for place, panel in zip(axes, panels, strict=True):
        _panel(place, panel, made, baseline)
    title = f"{made[0].get('model')}, {made[0].get('machine')}"
    figure.suptitle(title, fontsize="small")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(target, dpi=140)
    except (OSError, ValueError) as error:
        raise BadRequestError(f"cannot draw to {target}: {error}") from None


def _panel(axes: Axes, panel: tuple[str, str, str, str], made: Sequence[Result], baseline: Sequence[Result]) -> None:
    x_name, x_label, y_name, y_label = panel
    ticks: dict[float, str] = {}
    finite = [float(r[x_name]) for r in (*made, *baseline) if isinstance(r.get(x_name), (int, float))]
    beyond = 2 * max(finite, default=1.0)  # where a rate of "inf" stands
    for name, chosen in (("baseline", baseline), ("this", made)):
        points: list[tuple[float, float, Any]] = []
        for result in chosen:
            x, y = result.get(x_name), result.get(y_name)
            if isinstance(y, (int, float)) and x is not None:
                points.append((beyond if x == "inf" else float(x), float(y), result))
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        axes.plot(xs, ys, "o-", color=_COLOURS[name], label=name, markersize=4)
        p99 = y_name.replace("median", "p99")
        if p99 != y_name:
            tails = [float(point[2].get(p99, point[1])) for point in points]
            axes.plot(xs, tails, "o:", color=_COLOURS[name], label=f"{name}, P99", markersize=3)
        ticks |= {point[0]: str(point[2][x_name]) for point in points}
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [ticks[tick] for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if ticks:
        axes.legend(fontsize="small", frameon=False)
