#!/usr/bin/env python3
"""Makes Grafana's dashboards (classic JSON, Grafana 9 and later) from panels.py.

usage: generate.py [--check]

--check writes nothing: it fails when a file is not what would be written, and when lint.py finds
fault with one.
"""

import argparse
import json
import re
import sys

import lint
import metric_table
import panels

HERE = metric_table.ROOT / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MATCHERS = {"D": 'job=~"$job",instance=~"$instance"',
            "R": 'job=~"$job",instance=~"$instance",run=~"$run"',
            "G": 'job=~"$job",instance=~"$instance",run=~"$run",group=~"$group"'}
HEIGHTS = {"stat": 4}
KINDS = {"stacked": "timeseries"}
# name -> the query of its values
VARIABLES = {"job": "label_values(muond_build_info, job)",
             "instance": 'label_values(muond_build_info{job=~"$job"}, instance)',
             "run": 'label_values(muond_run_active{job=~"$job",instance=~"$instance"}, run)',
             "group": 'label_values(muond_parameters{job=~"$job",run=~"$run"}, group)'}


def expanded(expr):
    """The query with its matchers."""
    def matcher(match):
        return "{" + MATCHERS[match[1]] + ("," + match[3] if match[3] else "") + "}"
    return re.sub(r"%([DRG])(\{([^}]*)\})?", matcher, expr)


def present(panel, table):
    return all(metric_table.used(expr, table) <= table.keys() for expr, _ in panel.queries)


def field_config(panel):
    steps = [{"color": "green", "value": None}]
    if panel.bad is not None:
        steps.append({"color": "red", "value": panel.bad})
    custom = {}
    if panel.kind in ("timeseries", "stacked"):
        custom = {"lineWidth": 1, "fillOpacity": 60 if panel.kind == "stacked" else 0,
                  "showPoints": "never",
                  "stacking": {"mode": "normal" if panel.kind == "stacked" else "none"}}
    color = {"mode": "thresholds"} if panel.bad is not None and panel.kind == "stat" else {
        "mode": "palette-classic"}
    return {"defaults": {"unit": panel.unit, "noValue": "none", "color": color, "custom": custom,
                         "thresholds": {"mode": "absolute", "steps": steps}}, "overrides": []}


def options(panel):
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area",
                "colorMode": "value" if panel.bad is not None else "none"}
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": "none"}, "color": {"scheme": "Viridis"},
                "cellGap": 1, "tooltip": {"show": True, "yHistogram": True}}
    if panel.kind == "table":
        return {"showHeader": True}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}


def targets(panel):
    made = []
    for index, (expr, legend) in enumerate(panel.queries):
        target = {"datasource": SOURCE, "refId": chr(ord("A") + index), "expr": expanded(expr),
                  "legendFormat": legend}
        if panel.kind == "heatmap":
            target["format"] = "heatmap"
        if panel.kind == "table":
            target.update(instant=True, range=False, format="table")
        made.append(target)
    return made


def variables():
    made = [{"name": "datasource", "label": "Data source", "type": "datasource",
             "query": "prometheus", "hide": 0}]
    for name, query in VARIABLES.items():
        made.append({"name": name, "label": name.capitalize(), "type": "query",
                     "datasource": SOURCE, "query": {"query": query, "refId": name},
                     "refresh": 2, "multi": True, "includeAll": True, "allValue": ".+", "sort": 1,
                     "current": {"selected": True, "text": ["All"], "value": ["$__all"]}})
    return made


def annotations():
    return {"list": [
        {"name": "Restarts", "datasource": SOURCE, "enable": True, "iconColor": "orange",
         "expr": expanded("changes(process_start_time_seconds%D[2m]) > 0"),
         "titleFormat": "{{instance}} restarted"},
        {"name": "Overflow", "datasource": SOURCE, "enable": True, "iconColor": "red",
         "expr": expanded('increase(muond_steps_total%R{outcome="skipped_overflow"}[1m]) > 0'),
         "titleFormat": "{{run}} overflowed"}]}


def layout(rows, table):
    """Rows from top to bottom, panels from left to right, 24 columns."""
    made, y = [], 0
    for row in rows:
        kept = [panel for panel in row.panels if present(panel, table)]
        if not kept:
            continue
        made.append({"type": "row", "title": row.title, "collapsed": False, "panels": [],
                     "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        x = 0
        for panel in kept:
            height = HEIGHTS.get(panel.kind, 8)
            if x + row.width > 24:
                x, y = 0, y + height
            made.append({"type": KINDS.get(panel.kind, panel.kind), "title": panel.title,
                         "description": panel.text, "datasource": SOURCE,
                         "gridPos": {"x": x, "y": y, "w": row.width, "h": height},
                         "fieldConfig": field_config(panel), "options": options(panel),
                         "targets": targets(panel)})
            x += row.width
        y += height
    for number, panel in enumerate(made, 1):
        panel["id"] = number
    return made


def dashboard(source, table):
    return {"id": None, "uid": source.uid, "title": source.title, "description": source.text,
            "tags": ["muond"], "schemaVersion": 39, "version": 1, "editable": False,
            "graphTooltip": 1, "refresh": "30s", "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser", "templating": {"list": variables()},
            "annotations": annotations(), "panels": layout(source.rows, table),
            "links": [{"type": "dashboards", "tags": ["muond"], "title": "muond",
                       "asDropdown": False, "includeVars": True, "keepTime": True}]}


def files():
    """{path: text}"""
    table = metric_table.read()
    return {HERE / f"{source.uid}.json": json.dumps(dashboard(source, table), indent=2) + "\n"
            for source in panels.DASHBOARDS}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = files()
    faults = []
    for path, text in made.items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            faults.append(f"{path.name}: is not what dashboards/generate.py makes; run it")
        faults += lint.faults(path.name, json.loads(text))
    faults += lint.unused({path.name: json.loads(text) for path, text in made.items()})
    print("\n".join(faults), end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
