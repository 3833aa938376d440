"""The metrics of the product, read from docs/metrics.md, which a test holds to be what
server/metrics/metric_table.cc declares."""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROW = re.compile(r"\| `(\w+)` \| (counter|gauge|histogram) \| ([^|]*) \| (\w*) *\| ([^|]*) \|")
# Words of a query that look like a metric of ours.
NAME = re.compile(r"\b(?:muond|process|grpc_server)_[a-z0-9_]+\b")


@dataclasses.dataclass(frozen=True)
class Metric:
    """A row of the table."""
    name: str
    type: str
    labels: tuple
    unit: str
    help: str


def read():
    """{name: Metric}"""
    table = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        row = ROW.fullmatch(line)
        if row:
            labels = tuple(re.findall(r"`(\w+)`", row[3]))
            table[row[1]] = Metric(row[1], row[2], labels, row[4], row[5])
    assert len(table) > 20, "docs/metrics.md: the tables were not understood"
    return table


def family(name, table):
    """A histogram's parts belong to it."""
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return stem if name not in table and stem in table else name


def used(expr, table):
    """Names of metrics in a query. Recording rules (level:metric:operations) are none."""
    without_rules = re.sub(r"\b\w+:\w+(:\w+)*", "", expr)
    return {family(name, table) for name in NAME.findall(without_rules)}
