#!/usr/bin/env python3
"""Draws the dashboards with matplotlib from what a Prometheus answers: not Grafana, the same data.

usage: render.py --prometheus URL --output FOLDER [--minutes N]
"""

import argparse
import json
import math
import pathlib
import re
import time
import urllib.parse
import urllib.request

import generate

COLUMNS = 24
PER_UNIT = (.72, .34)  # inches of a column and of a unit of height


def load(path):
    return json.loads(path.read_text())


class Answers:
    """The query API of a Prometheus."""

    def __init__(self, url):
        self.url = url

    def query_range(self, expr, start, end, step=1):
        query = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": step})
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{query}", timeout=30) as reply:
            result = json.loads(reply.read())["data"]["result"]
        return [(series["metric"], [(float(t), float(v)) for t, v in series["values"]])
                for series in result]


def legend(template, labels):
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    template = re.sub(r" *\{\{\w+\}\}", "", template)  # labels that are empty
    return template or ", ".join(labels.values())


def human(value, unit):
    if not math.isfinite(value):
        return "none"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit in ("bytes", "Bps"):
        for prefix in ("", "Ki", "Mi", "Gi"):
            if abs(value) < 1024 or prefix == "Gi":
                return f"{value:.3g} {prefix}B" + ("/s" if unit == "Bps" else "")
            value /= 1024
    if unit == "s":
        return f"{1e3 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    return f"{value:.5g}" + ("/s" if unit == "ops" else "")


def draw_stat(axes, panel, series):
    value = series[0][1][-1][1] if series else math.nan
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    bad = len(steps) > 1 and value >= steps[1]["value"]
    axes.axis("off")
    axes.text(.5, .4, human(value, panel["fieldConfig"]["defaults"]["unit"]), ha="center",
              va="center", fontsize=15, color="crimson" if bad else "black")


def draw_table(axes, panel, series):
    axes.axis("off")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = [f"{name}: {human(samples[-1][1], unit)}" for name, samples in series[:14]]
    axes.text(0, 1, "\n".join(lines), va="top", fontsize=6.5, family="monospace")


def draw_heatmap(axes, labelled, start):
    """Buckets are cumulative: the difference of neighbours is what fell between them."""
    rows = sorted(labelled, key=lambda row: float(row[0].replace("+Inf", "inf")))
    if not rows:
        return
    times = sorted({t for _, samples in rows for t, _ in samples})
    columns = {t: i for i, t in enumerate(times)}
    grid = [[0.0] * len(times) for _ in rows]
    for i, (_, samples) in enumerate(rows):
        for t, value in samples:
            grid[i][columns[t]] = value
    cells = [[high - low for high, low in zip(row, [0.0] * len(row) if i == 0 else grid[i - 1])]
             for i, row in enumerate(grid)]
    axes.imshow(cells, aspect="auto", origin="lower", cmap="viridis",
                extent=(times[0] - start, times[-1] - start, -.5, len(rows) - .5))
    axes.set_yticks(range(0, len(rows), 2), [name for name, _ in rows[::2]])


def draw_lines(axes, panel, series, start):
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    kept = [(name, samples) for name, samples in series
            if any(math.isfinite(value) for _, value in samples)]
    if stacked and kept:
        times = sorted({t for _, samples in kept for t, _ in samples})
        values = [[dict(samples).get(t, 0.0) for t in times] for _, samples in kept]
        values = [[v if math.isfinite(v) else 0.0 for v in row] for row in values]
        axes.stackplot([t - start for t in times], values, labels=[n for n, _ in kept], alpha=.7)
    else:
        for name, samples in kept:
            axes.plot([t - start for t, _ in samples], [v for _, v in samples], lw=1, label=name)
    if 0 < len(kept) <= 12:
        axes.legend(fontsize=5, loc="best")
    axes.grid(alpha=.3)


def draw_panel(figure, panel, height, answers, start, end, substitute):
    box = panel["gridPos"]
    axes = figure.add_axes((box["x"] / COLUMNS + .025, 1 - (box["y"] + box["h"] - 1.1) / height,
                            box["w"] / COLUMNS - .04, (box["h"] - 2.4) / height))
    axes.set_title(panel["title"], fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    series, buckets = [], []
    for target in panel["targets"]:
        step = max((end - start) / 120, 1)
        for labels, samples in answers.query_range(substitute(target["expr"]), start, end, step):
            series.append((legend(target["legendFormat"], labels), samples))
            buckets.append((labels.get("le", "0"), samples))
    if panel["type"] == "stat":
        draw_stat(axes, panel, series)
    elif panel["type"] == "table":
        draw_table(axes, panel, series)
    elif panel["type"] == "heatmap":
        draw_heatmap(axes, buckets, start)
    else:
        draw_lines(axes, panel, series, start)


def draw(answers, folder, end, window, seconds=60):
    """All dashboards as PNG. `window`: seconds that rates look back."""
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel

    def substitute(expr):
        for name in ("job", "instance", "run", "group"):
            expr = expr.replace(f"${name}", ".+")
        return expr.replace("$__rate_interval", f"{window}s")

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in generate.files():
        dashboard = load(path)
        height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"]) + 1
        figure = pyplot.figure(figsize=(COLUMNS * PER_UNIT[0], height * PER_UNIT[1]), dpi=80)
        figure.text(.01, 1 - .4 / height, dashboard["title"] + "  (drawn by dashboards/render.py)",
                    fontsize=11, weight="bold")
        for panel in dashboard["panels"]:
            if panel["type"] == "row":
                figure.text(.01, 1 - (panel["gridPos"]["y"] + 1) / height, panel["title"],
                            fontsize=9, weight="bold")
            else:
                draw_panel(figure, panel, height, answers, end - seconds, end, substitute)
        figure.savefig(folder / f"{path.stem}.png")
        pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--output", required=True)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    draw(Answers(options.prometheus), options.output, time.time(), 60, options.minutes * 60)


if __name__ == "__main__":
    main()
