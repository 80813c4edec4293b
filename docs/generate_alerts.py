"""Writes the PrometheusRule for the Prometheus operator: ``python docs/generate_alerts.py``."""

from pathlib import Path
from textwrap import indent

DEPLOY = Path(__file__).parents[1] / "deploy"
SOURCE = DEPLOY / "prometheus" / "kvbus.rules.yml"
MANIFEST = DEPLOY / "kubernetes" / "components" / "monitoring" / "alerts.yaml"

HEAD = """\
# Written by `python docs/generate_alerts.py` from deploy/prometheus/kvbus.rules.yml. Do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvbus
spec:
"""


def manifest() -> str:
    return HEAD + indent(SOURCE.read_text(encoding="utf-8"), "  ")


if __name__ == "__main__":
    MANIFEST.write_text(manifest(), encoding="utf-8")
