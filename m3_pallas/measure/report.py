"""What a record of `bench` looks like: lines on the screen, a table in Markdown, a plot."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

from m3_pallas.measure.profiling import PROFILER, geometric_mean

Row = dict[str, Any]
RATIOS = {
    "decode": ("best_peer_over_ours", "xla_way_over_ours"),
    "prefill": ("best_peer_over_ours_score", "best_peer_over_ours_selection", "xla_way_over_ours"),
}
DECODE_HEAD = (
    f"{'decode':<24}{'score':>8}{'select':>8}{'call us':>10}{'GB/s':>7}{'share':>7}"
    f"{'vLLM us':>10} {'variant':<11}{'ratio':>6}{'ids':>7}{'XLA way':>10}{'ratio':>7}"
)
PREFILL_HEAD = (
    f"{'prefill':<24}{'score':>9}{'top-k':>8}{'combined':>10}{'TFLOP/s':>9}{'share':>7}"
    f"{'vLLM / ours':>13}{'ids':>7}{'XLA way':>10}{'ratio':>7}"
)


def number(value: float | None, width: int, form: str = ".1f") -> str:
    """Right-aligned, or a dash where there is none."""
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"


def decode_line(row: Row) -> str:
    peers = row.get("peers_us", {})
    best = min(peers, key=peers.get) if peers else None
    return (
        f"{row['shape']:<24}{number(row['score_us'], 8)}{number(row['selection_us'], 8)}{number(row['call_us'], 10)}"
        f"{number(row['gb_per_s'], 7, '.0f')}{number(row['share_of_ceiling'], 7, '.0%')}"
        f"{number(peers.get(best), 10)} {best or '-':<11}{number(row.get('best_peer_over_ours'), 6, '.2f')}"
        f"{number(row['ids_equal'][best] if best else None, 7, '.1%')}"
        f"{number(row.get('xla_way_us'), 10)}{number(row.get('xla_way_over_ours'), 7, '.2f')}{_label(row)}"
    )


def prefill_line(row: Row) -> str:
    ratios = [row.get(f"best_peer_over_ours_{part}") for part in ("score", "selection")]
    both = "-" if None in ratios else " ".join(f"{ratio:.2f}" for ratio in ratios)
    ids = min((row["ids_equal"][variant] for variant in row.get("peers_us", ())), default=None)
    return (
        f"{row['shape']:<24}{number(row['score_us'], 9)}{number(row['selection_us'], 8)}"
        f"{number(row['combined_us'], 10)}{number(row['tflop_per_s'], 9, '.2f')}"
        f"{number(row['share_of_ceiling'], 7, '.0%')}{both:>13}{number(ids, 7, '.1%')}"
        f"{number(row.get('xla_way_us'), 10)}{number(row.get('xla_way_over_ours'), 7, '.2f')}{_label(row)}"
    )


def _label(row: Row) -> str:
    """What the columns do not say."""
    notes = [row["method"]] if row.get("method", PROFILER) != PROFILER else []
    notes += [] if row.get("combined_equal", True) else ["combined call DIFFERS"]
    notes += [f"vLLM {variant}: {error}" for variant, error in row.get("peer_errors", {}).items()]
    notes += [
        f"vLLM {variant} by {method}" for variant, method in row.get("peer_methods", {}).items() if method != PROFILER
    ]
    notes += [f"XLA way: {row['xla_way_error']}"] if "xla_way_error" in row else []
    return f"  ({'; '.join(notes)})" if notes else ""


def finished(rows: list[Row]) -> list[Row]:
    """Rows that were measured; the others hold an error."""
    return [row for row in rows if "error" not in row]


def geometric_means(record: Row) -> dict[str, float]:
    """Of every ratio, over the rows that have it."""
    means = {}
    for call, names in RATIOS.items():
        for name in names:
            ratios = [row[name] for row in record.get(call, []) if name in row]
            if ratios:
                means[f"{call} {name}"] = geometric_mean(ratios)
    return means


def markdown(record: Row) -> str:
    """The decode rows, then the prefill rows, as tables. Times are in microseconds."""
    lines = []
    decode, prefill = (finished(record.get(call, [])) for call in ("decode", "prefill"))
    if decode:
        peers = list(dict.fromkeys(peer for row in decode for peer in row.get("peers_us", {})))
        names = ["score", "selection", "call", "GB/s", "share", *peers, "best peer / ours", "XLA way / ours"]
        lines += _head(["shape", *names])
        for row in decode:
            cells = [row["shape"], *(number(row[key], 0, ".2f") for key in ("score_us", "selection_us", "call_us"))]
            cells += [f"{row['gb_per_s']:.0f}", number(row["share_of_ceiling"], 0, ".1%")]
            cells += [number(row.get("peers_us", {}).get(peer), 0) for peer in peers]
            cells += [number(row.get(name), 0, ".2f") for name in RATIOS["decode"]]
            lines.append(_line(cells))
    if prefill:
        names = ["score", "top-k", "combined", "TFLOP/s", "share", "vLLM score", "vLLM top-k"]
        lines += _head(["shape", *names, "score ratio", "top-k ratio", "XLA way / combined"])
        for row in prefill:
            peers = row.get("peers_us", {}).values()
            cells = [row["shape"], *(f"{row[key]:.1f}" for key in ("score_us", "selection_us", "combined_us"))]
            cells += [f"{row['tflop_per_s']:.0f}", number(row["share_of_ceiling"], 0, ".1%")]
            cells += [number(min((p[part] for p in peers), default=None), 0) for part in ("score", "selection")]
            cells += [number(row.get(name), 0, ".2f") for name in RATIOS["prefill"]]
            lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(names: list[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def plot(record: Row, file: pathlib.Path) -> None:
    """Share of the read ceiling over the context, and of the matrix ceiling over the prefill shapes."""
    from matplotlib.figure import Figure

    rows = {
        call: [row for row in finished(record.get(call, [])) if row["share_of_ceiling"] is not None]
        for call in ("decode", "prefill")
    }
    calls = [call for call in rows if rows[call]]
    if not calls:
        return
    figure = Figure(figsize=(7 * len(calls), 4), layout="constrained")
    axes = figure.subplots(1, len(calls), squeeze=False)
    for call, ax in zip(calls, axes[0], strict=True):
        {"decode": _plot_decode, "prefill": _plot_prefill}[call](rows[call], ax)
        ax.set_title(f"{call}, {record['device']}, JAX {record['jax']}")
    figure.savefig(file, dpi=110)


def _limit(rows: list[Row]) -> float:
    """Above every share: those of keys in a cache pass 100%."""
    return 1.05 * max(1.0, *(row["share_of_ceiling"] for row in rows))


def _plot_decode(rows: list[Row], ax: Any) -> None:
    """A line for each batch and number of heads: colors tell batches, markers heads."""
    lines: dict[tuple[int, int, int], list[tuple[int, float]]] = {}
    for row in rows:
        key = (row["requests"], row["query_len"], row["heads"])
        lines.setdefault(key, []).append((row["context"], row["share_of_ceiling"]))
    batches = {batch: f"C{i}" for i, batch in enumerate(sorted({key[:2] for key in lines}))}
    markers = dict(zip(sorted({key[2] for key in lines}), itertools.cycle("osD^vP"), strict=False))
    for (requests, query_len, heads), points in lines.items():
        style = {"color": batches[requests, query_len], "marker": markers[heads]}
        ax.plot(*zip(*sorted(points), strict=True), fillstyle="none", linewidth=0.8, **style)
    for (requests, query_len), color in batches.items():
        ax.plot([], [], color=color, label=f"R {requests}" + (f" q {query_len}" if query_len > 1 else ""))
    for heads, marker in markers.items():
        ax.plot([], [], "k", marker=marker, linestyle="", fillstyle="none", label=f"H {heads}")
    ax.set(xscale="log", xlabel="context, tokens", ylabel="share of the read ceiling", ylim=(0, _limit(rows)))
    ax.axhline(1, color="gray", linewidth=0.8)
    ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _plot_prefill(rows: list[Row], ax: Any) -> None:
    ax.barh([row["shape"] for row in rows][::-1], [row["share_of_ceiling"] for row in rows][::-1])
    ax.set(xlabel="share of the matrix ceiling", xlim=(0, _limit(rows)))
