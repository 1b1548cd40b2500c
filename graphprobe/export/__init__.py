"""Exporters: they read snapshots and hand them to a metrics system. Each imports its client only when it is used."""
