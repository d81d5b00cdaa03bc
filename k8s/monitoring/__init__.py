"""Monitoring: the source of the Grafana dashboard and of the table of metrics; beside it the manifests that use them.

Knows the names of the metrics and Grafana's and Prometheus' formats; knows nothing of how the metrics are collected.
"""
