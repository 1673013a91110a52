import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # ONNX Runtime's wheels report to Microsoft as soon as they are imported without it
