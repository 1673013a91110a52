"""Processes that run beside a server: gateway, guard, helpers of the live store, updaters of tables."""
