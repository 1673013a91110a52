"""The network file that a script of HugeCTR wrote, with its chains as MLP layers."""

import json

import pytest

from export.nvidia.hugectr.foreign import read_foreign
from serving.contract.errors import ConfigError


class TestMlp:
    """HugeCTR's own DLRM samples write their chains as MLP layers."""

    def document(self, **param):
        mlp = {"num_outputs": [8, 4], "activation": "Relu"} | param
        return {
            "layers": [
                {
                    "type": "Data",
                    "label": {"top": "label", "label_dim": 1},
                    "dense": {"top": "dense", "dense_dim": 3},
                    "sparse": [{"top": "keys", "nnz_per_slot": 1, "is_fixed_length": True, "slot_num": 2}],
                },
                {
                    "type": "LocalizedSlotSparseEmbeddingHash",
                    "bottom": "keys",
                    "top": "rows",
                    "sparse_embedding_hparam": {"embedding_vec_size": 4, "combiner": "sum"},
                },
                {"type": "MLP", "bottom": ["dense"], "top": ["mlp1"], "mlp_param": mlp},
                {"type": "Interaction", "bottom": ["mlp1", "rows"], "top": ["inter", "inter_grad"]},
                {"type": "FusedInnerProduct", "bottom": "inter", "top": "fc", "fc_param": {"num_output": 5}},
                {"type": "Dropout", "bottom": "fc", "top": "drop", "rate": 0.5},
                {"type": "InnerProduct", "bottom": "drop", "top": "logit", "fc_param": {"num_output": 1}},
                {"type": "BinaryCrossEntropyLoss", "bottom": ["logit", "label"], "top": "loss"},
            ]
        }

    def test_is_read(self, tmp_path):
        (tmp_path / "net.json").write_text(json.dumps(self.document()))
        found = read_foreign(tmp_path / "net.json")
        assert (found.bottom, found.top) == (((3, 8), (8, 4)), ((4 + 3 + 1, 5), (5, 1)))
        assert (found.slots, found.width, found.combiner) == (2, 4, "sum")

    @pytest.mark.parametrize(
        ("param", "message"),
        [
            ({"activations": ["Relu", "Tanh"]}, r"the activations \['Tanh'\]"),
            ({"use_bias": False}, "layers without bias"),
            ({"activations": ["Relu", "None"]}, "ReLUs are missing"),
        ],
    )
    def test_what_it_must_not_have(self, tmp_path, param, message):
        (tmp_path / "net.json").write_text(json.dumps(self.document(**param)))
        with pytest.raises(ConfigError, match=message):
            read_foreign(tmp_path / "net.json")
