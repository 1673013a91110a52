"""Table budgets, and the ps.json that drives both NVIDIA's `hps` backend and our own levels.

tables.toml ─▶ description ─▶ planning (memory, hit_rate) ─▶ report, ps_writer ─▶ ps.json
ps.json ─▶ parsers A and B, checks ─▶ reader.read_ps_json ─▶ levels.convert_levels ─▶ serving/tables
"""
