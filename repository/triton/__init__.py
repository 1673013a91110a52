"""The files of a model that tritonserver reads: `config.pbtxt`, `model.py`, and the code that it imports."""
