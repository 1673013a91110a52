"""The merlin profile: the same stages as `cpu`, laid out for NVIDIA's containers.

parts.py        the models of the repository: which part of which stage each is, and the files it needs
settings.py     [merlin] of the export's settings
hps.py          ps.json and the sparse folder of the one table that the `hps` backend serves
graph.py        the DLRM's ONNX file behind `hps`: its rows arrive as one flat tensor
config.py       config.pbtxt of the nested ensembles and of the `hps` model
publish.py      a staged generation of the cpu profile -> a merlin repository
pipeline.py     the repository's ensembles carried out in this process, from its own files: rehearsal and `make check`
check.py        what the backends would refuse, or answer wrongly from
docs/merlin.md says why it is laid out so.
"""
