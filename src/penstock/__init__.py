"""Penstock: a durable message broker; one log, many doors."""
