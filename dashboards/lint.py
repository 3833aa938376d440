"""What is wrong with a dashboard, as sentences: the rules of Grafana's dashboard-linter that apply,
and that every metric of a query is one of ours."""

import pathlib
import re
import sys

import metric_table
import panels

UNITS = {"s", "bytes", "Bps", "percentunit", "short", "ops", "none"}
COUNTER_USE = r"(?:rate|increase|changes)\(\s*{}\b"
ALERTS = pathlib.Path(__file__).resolve().parents[1] / "deploy" / "prometheus"


def _overlap(a, b):
    return (a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
            and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"])


def _of_query(where, expr, table):
    found = []
    if expr.count("(") != expr.count(")") or expr.count("{") != expr.count("}") or "%" in expr:
        found.append(f"{where}: the query is not whole: {expr}")
    for name in metric_table.used(expr, table):
        metric = table.get(name)
        if metric is None:
            found.append(f"{where}: there is no metric {name}")
            continue
        if name.endswith("_cosine") and f"{name}_sum" in expr:
            found.append(f"{where}: the sum of {name} may fall: rate() would see restarts")
        if metric.type == "counter" and not re.search(COUNTER_USE.format(name), expr):
            if not name.endswith("_fallbacks_total"):  # its whole history matters
                found.append(f"{where}: {name} is a counter: rate or increase of it")
    for selector in re.findall(r"\b(?:muond|process|grpc_server)_\w+(?!\w|\()(\{[^}]*\})?", expr):
        if 'job=~"$job"' not in selector or 'instance=~"$instance"' not in selector:
            found.append(f"{where}: a selector without job and instance: {expr}")
    if re.search(r"\[\d+[smh]\]", expr):
        found.append(f"{where}: a fixed window: use $__rate_interval")
    return found


def _of_panel(where, panel, table):
    found = []
    if panel["type"] == "row":
        return found
    for field in ("title", "description"):
        if not panel.get(field):
            found.append(f"{where}: has no {field}")
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    if defaults.get("unit") not in UNITS:
        found.append(f"{where}: unit {defaults.get('unit')!r} is not one of {sorted(UNITS)}")
    if not defaults.get("thresholds"):
        found.append(f"{where}: has no thresholds")
    if not defaults.get("noValue"):
        found.append(f"{where}: does not say what stands where there is no value")
    if not panel.get("targets"):
        found.append(f"{where}: has no query")
    for part in [panel, *panel.get("targets", [])]:
        if part.get("datasource", {}).get("uid") != "${datasource}":
            found.append(f"{where}: a data source that is not the variable's")
    for target in panel.get("targets", []):
        found += _of_query(where, target["expr"], table)
    return found


def faults(name, dashboard):
    """All that is wrong with one."""
    table = metric_table.read()
    found = []
    if dashboard.get("id") is not None or not re.fullmatch(r"[a-z0-9-]{1,40}", dashboard["uid"]):
        found.append(f"{name}: id must be null and uid a name")
    if dashboard.get("editable") is not False:
        found.append(f"{name}: must not be editable")
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    for wanted in ("datasource", "job", "instance", "run", "group"):
        if wanted not in variables:
            found.append(f"{name}: has no variable {wanted}")
    for variable in variables.values():
        if variable["type"] == "query" and not (
                variable.get("multi") and variable.get("includeAll")
                and variable.get("allValue") == ".+" and variable.get("refresh") == 2):
            found.append(f"{name}: variable {variable['name']}: several, all, refreshed with time")
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        found.append(f"{name}: a panel's id twice")
    for index, panel in enumerate(dashboard["panels"]):
        where = f"{name}: panel {panel.get('title')!r}"
        found += _of_panel(where, panel, table)
        if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24:
            found.append(f"{where}: is beyond the right edge")
        for other in dashboard["panels"][:index]:
            if _overlap(panel["gridPos"], other["gridPos"]):
                found.append(f"{where}: lies on {other.get('title')!r}")
    return found


def unused(dashboards):
    """Metrics that neither panel nor alert uses nor panels.UNUSED lists, and the reverse."""
    table = metric_table.read()
    sys.path.insert(0, str(ALERTS))
    import alert_table  # pylint: disable=import-outside-toplevel,import-error
    text = " ".join(target["expr"] for dashboard in dashboards.values()
                    for panel in dashboard["panels"] for target in panel.get("targets", []))
    used = metric_table.used(text, table)
    for expr in [*alert_table.RECORDING.values(), *(a.expr for a in alert_table.ALERTS)]:
        used |= metric_table.used(expr, table)
    found = [f"{name}: no panel and no alert uses it; use it or list it in panels.UNUSED"
             for name in table if name not in used and name not in panels.UNUSED]
    found += [f"{name}: is used, or no metric: take it off panels.UNUSED"
              for name in panels.UNUSED if name in used or name not in table]
    return found
