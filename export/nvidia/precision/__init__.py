"""Precision written into the graph: strongly typed engines (TensorRT 10, 11) compute in the types that the ONNX file states.

fp16: casts around the nodes that may be halved (`half.py`); int8: Q/DQ pairs with ranges from recorded requests (`int8.py`).
Inputs and outputs stay fp32, so nothing around the network changes. Recorded requests decide which nodes stay fp32.
`python -m experiments.precision` measures the effect of each precision on the recommendations.
"""
