"""What less arithmetic and narrower rows do to recommendations, each on test users of a real log.

python -m experiments.quality.compression     smaller ranking networks: distilled, pruned, int8
python -m experiments.quality.precision       networks in fp16 and int8
python -m experiments.quality.row_formats     embedding rows in fp16 and int8
python -m experiments.quality.row_widths      narrow rows for rare keys
"""
