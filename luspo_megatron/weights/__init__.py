"""Weights between layouts: the table of names, the plan, the transports."""
