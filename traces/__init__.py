"""Spans of requests, sent to an OpenTelemetry collector; off unless an endpoint is set."""
