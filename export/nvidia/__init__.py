"""The merlin profile: the same stages as `cpu`, laid out for NVIDIA's containers.

source.py       what it is made from: a generation of the cpu profile
parts.py        the models of the repository: which part of which stage each is, and the files it needs
settings.py     [merlin] of the export's settings
hps.py          ps.json and the sparse folder of the one table that the `hps` backend serves
graph.py        the DLRM's ONNX file behind `hps`: its rows arrive as one flat tensor
config.py       config.pbtxt of the nested ensembles and of the `hps` model
write.py        writes the repository, model by model
publish.py      rehearses it and puts it in place
pipeline.py     the repository's ensembles carried out in this process, from its own files: rehearsal and `make check`
workflow.py     preprocess as NVTabular's own workflow model, which is workflow_model.py beside what merlin-systems writes
index.py        the retriever's index as a GPU can hold it
hugectr_backend.py  the ranker for the older `hugectr` backend, in a repository of its own
check.py        what the backends would refuse, or answer wrongly from
docs/merlin.md says why it is laid out so.
"""
