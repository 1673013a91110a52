import serving  # noqa: F401  so that ONNX Runtime is told before its import that it must not report
