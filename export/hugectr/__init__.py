"""A trained DLRM as HugeCTR's own model files: network JSON, dense file, sparse folder. Read back by the same package."""
