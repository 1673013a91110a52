"""A DLRM in HugeCTR's own files, written and read.

layers.py, network.py, dense_file.py, model.py   the trained ranker as network JSON, dense file, sparse folder, and back
forward.py                                       what such files answer, in plain numpy
inputs.py, training_data.py, teach.py            what HugeCTR is taught: `python -m export hugectr-data`
container/train_dlrm.py                          … and by which script, inside NVIDIA's container
foreign.py, importing.py, ranker.py              what it trained, as the rank stage of any profile: [hugectr] in the settings
"""
