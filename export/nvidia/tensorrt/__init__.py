"""TensorRT: the exported files, and the engine builder that runs inside NVIDIA's containers.

<REPO>/<model>/config.pbtxt               read by tritonserver; the start script may replace it by one of configs/
<REPO>/<model>/configs/tensorrt.pbtxt
<REPO>/<model>/configs/onnxruntime.pbtxt
<REPO>/<model>/configs/python.pbtxt
<REPO>/<model>/<generation>/model.onnx    the network, with its precision in the graph (export/nvidia/precision)
<REPO>/<model>/<generation>/engine.json   precision and optimisation profiles, for `build_engines.py`
<REPO>/<model>/<generation>/model.py      ONNX Runtime in the Python backend, for images without the ONNX Runtime backend
<REPO>/<model>/<generation>/model.plan    written on the target machine, before the server starts
"""
