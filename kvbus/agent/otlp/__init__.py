"""Spans of what has ended, by OTLP over HTTP; only where the configuration names a collector.

outbox   what waits to be sent, bounded; all that the rest of an agent sees
encode   spans as the message of OTLP; the only import of opentelemetry
post     one request to the collector
sender   the thread that does all of it
"""
