"""The ranker and the re-ranker: their data, training, teachers, ONNX graphs and files."""
