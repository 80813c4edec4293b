"""The HTTP port of an agent: metrics, probes, what it holds; for people, Prometheus and kubelets.

Refuses to change anything: every request is a question.
"""
