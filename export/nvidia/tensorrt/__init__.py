"""TensorRT: what is exported for it, and the engine builder that runs inside NVIDIA's containers.

<REPO>/<model>/config.pbtxt               what tritonserver reads; the start script replaces it when it has to fall back
<REPO>/<model>/configs/tensorrt.pbtxt     … by one of these
<REPO>/<model>/configs/onnxruntime.pbtxt
<REPO>/<model>/configs/python.pbtxt
<REPO>/<model>/<generation>/model.onnx    precision is written into it (export/nvidia/precision)
<REPO>/<model>/<generation>/engine.json   precision and optimisation profiles: what `build_engines.py` needs to know
<REPO>/<model>/<generation>/model.py      ONNX Runtime in the Python backend, for images without the ONNX Runtime backend
<REPO>/<model>/<generation>/model.plan    written on the target machine, before the server starts
"""
