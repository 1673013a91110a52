"""Layouts of NVIDIA's HPS on disk and on the wire: sparse folders, Kafka messages, Redis hashes, RocksDB column families.

Pure functions on arrays and bytes: no connection is opened here. All numbers are little-endian.
"""
