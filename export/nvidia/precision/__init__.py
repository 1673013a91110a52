"""Precision written into the graph: strongly typed engines (TensorRT 10, 11) compute in the types that the ONNX file states.

fp16: casts around what may be halved (`half.py`); int8: Q/DQ pairs with ranges from recorded requests (`int8.py`). Inputs and
outputs stay fp32 in both, so that nothing around the network changes. What must not be lowered is decided on recorded requests.
`python -m experiments.precision` shows what each precision does to the recommendations.
"""
