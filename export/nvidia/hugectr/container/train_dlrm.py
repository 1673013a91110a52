"""Train the DLRM with HugeCTR, inside NVIDIA's merlin-hugectr container (23.08 to 24.06), on what `hugectr-data` wrote:

    python -m export hugectr-data --data online-retail --out /tmp/hugectr                       # here
    docker run --gpus 1 --rm -v /tmp/hugectr:/work -v $PWD/export/nvidia/hugectr/container:/code \
        nvcr.io/nvidia/merlin/merlin-hugectr:24.06 python /code/train_dlrm.py --folder /work    # there

It leaves dlrm.json, dlrm_dense_<iteration>.model and dlrm0_sparse_<iteration>.model beside dlrm_inputs.json; the export takes
these four by `[hugectr] model = "/tmp/hugectr"` in its settings. The script needs nothing of this project.
"""

import argparse
import json
import os

import hugectr

NAME = "dlrm"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, help="what hugectr-data wrote")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.002)
    return parser.parse_args()


def build(sizes, batch_size, learning_rate):
    """Build the export's network: bottom with a ReLU after every layer, Interaction, top with one after all but the last."""
    solver = hugectr.CreateSolver(
        batchsize=batch_size,
        batchsize_eval=batch_size,
        max_eval_batches=max(1, sizes["rows"]["validation"] // batch_size),
        lr=learning_rate,
        vvgpu=[[0]],
        repeat_dataset=True,
        i64_input_key=True,
    )
    reader = hugectr.DataReaderParams(
        data_reader_type=hugectr.DataReaderType_t.Parquet,
        source=["./train/_file_list.txt"],
        eval_source="./validation/_file_list.txt",
        check_type=hugectr.Check_t.Non,
    )
    optimizer = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Global)
    model = hugectr.Model(solver, reader, optimizer)
    nnz = sizes["nnz_per_slot"]
    fixed = all(length == 1 for length in nnz)
    model.add(
        hugectr.Input(
            label_dim=1,
            label_name="label",
            dense_dim=sizes["dense_dim"],
            dense_name="dense",
            data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("keys", nnz, fixed, len(nnz))],
        )
    )
    rows_bytes = sizes["vocabulary"] * sizes["width"] * 4
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=1 + 4 * rows_bytes // 2**20,  # Adam keeps two more values per weight
            embedding_vec_size=sizes["width"],
            combiner="mean",
            sparse_embedding_name="sparse_embedding",
            bottom_name="keys",
            optimizer=optimizer,
        )
    )
    bottom = add_mlp(model, "bottom", "dense", sizes["bottom"], relu_last=True)
    model.add(
        hugectr.DenseLayer(
            layer_type=hugectr.Layer_t.Interaction, bottom_names=[bottom, "sparse_embedding"], top_names=["interaction"]
        )
    )
    logit = add_mlp(model, "top", "interaction", sizes["top"], relu_last=False)
    model.add(
        hugectr.DenseLayer(layer_type=hugectr.Layer_t.BinaryCrossEntropyLoss, bottom_names=[logit, "label"], top_names=["loss"])
    )
    return model


def add_mlp(model, name, enters, widths, relu_last):
    """Add InnerProduct and ReLU layers. Return the name of their output tensor."""
    for i, width in enumerate(widths):
        top = f"{name}_fc{i}"
        model.add(
            hugectr.DenseLayer(
                layer_type=hugectr.Layer_t.InnerProduct, bottom_names=[enters], top_names=[top], num_output=width
            )
        )
        enters = top
        if relu_last or i < len(widths) - 1:
            enters = f"{name}_relu{i}"
            model.add(hugectr.DenseLayer(layer_type=hugectr.Layer_t.ReLU, bottom_names=[top], top_names=[enters]))
    return enters


def main():
    args = parse_arguments()
    os.chdir(args.folder)  # the file lists name files from here
    with open("training.json") as file:
        sizes = json.load(file)
    iterations = max(1, args.epochs * sizes["rows"]["train"] // args.batch_size)
    model = build(sizes, args.batch_size, args.learning_rate)
    model.compile()
    model.summary()
    model.graph_to_json(graph_config_file=NAME + ".json")
    interval = max(1, iterations // 10)
    model.fit(max_iter=iterations + 1, display=interval, eval_interval=interval, snapshot=iterations, snapshot_prefix=NAME)


if __name__ == "__main__":
    main()
