"""The merlin profile: the same stages as `cpu`, laid out for NVIDIA's containers.

source.py       its input: a generation of the cpu profile
parts.py        the models of the repository: the stage and the files of each
hps.py          ps.json and the sparse folder of the one table that the `hps` backend serves
graph.py        the DLRM's ONNX file behind `hps`, which takes all rows as one flat tensor
config.py       config.pbtxt of the nested ensembles and of the `hps` model
write.py        writes the repository, model by model
publish.py      rehearses the repository and puts it in place
pipeline.py     runs the repository's ensembles in this process, from its own files: for the rehearsal and `make check`
workflow.py     preprocess as NVTabular's own workflow model: workflow_model.py plus the files of merlin-systems
index.py        the retriever's index in a form that a GPU can hold
hugectr_backend.py  the ranker for the older `hugectr` backend, in a repository of its own
hugectr/        rankers trained by HugeCTR: training data, its file formats, import
precision/      networks in fp16 and int8, and ONNX Runtime's answers rounded as TensorRT rounds them
tensorrt/       configs, engines and checks of the TensorRT backend
check.py        what the backends would refuse or answer wrongly

The export's settings of this profile are in export/merlin_settings.py; docs/merlin.md gives the reasons for the layout.
"""
