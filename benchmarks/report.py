"""Turn a results file of `benchmarks.decode` into a table in Markdown and a plot of the share of the read ceiling.

python -m benchmarks.report benchmarks/results/decode_h200.json [--plot FILE.png]
"""

import argparse
import json
import pathlib

COLORS = {1: "tab:blue", 4: "tab:orange"}


def table(record: dict) -> str:
    peers = list(record["rows"][0].get("peers_us", {}))
    head = ["shape", "score", "selection", "call", "GB/s", "share", *peers, "best peer / ours", "XLA way / ours"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in record["rows"]:
        cells = [row["shape"], *(f"{row[key]:.2f}" for key in ("score_us", "selection_us", "call_us"))]
        cells += [f"{row['gb_per_s']:.0f}", f"{row['share_of_ceiling']:.1%}"]
        cells += [f"{row['peers_us'][peer]:.1f}" for peer in peers]
        cells += [f"{row['best_peer_over_ours']:.2f}"] if peers else [""]
        cells.append(f"{row['xla_way_over_ours']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(record: dict, file: pathlib.Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for row in record["rows"]:
        words = row["shape"].split()
        context = words[6]
        tokens = int(context[:-1]) * (2**20 if context[-1] == "M" else 1024)
        axes.plot(tokens, row["share_of_ceiling"], "o", color=COLORS[int(words[3])])
        axes.annotate(f"R {words[1]}", (tokens, row["share_of_ceiling"]), xytext=(5, 3), textcoords="offset points")
    for heads, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=f"H {heads}")
    axes.set(xscale="log", xlabel="context, tokens", ylabel="share of the read ceiling", ylim=(0, 1.05))
    axes.set_title(f"decode, score and selection, {record['device']}, JAX {record['jax']}")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    record = json.loads(options.results.read_text())
    print(table(record))
    if options.plot:
        plot(record, options.plot)


if __name__ == "__main__":
    main()
