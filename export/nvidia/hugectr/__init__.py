"""A DLRM in HugeCTR's own files, written and read.

layers.py, network.py, dense_file.py, model.py   the trained ranker as network JSON, dense file, sparse folder, and back
forward.py                                       the model of such files in plain NumPy
inputs.py, training_data.py                      HugeCTR's training data: `python -m export hugectr-data`
container/train_dlrm.py                          its training script, for NVIDIA's container
foreign.py, importing.py, ranker.py              its trained model as the rank stage of any profile: [hugectr] in the settings
"""
