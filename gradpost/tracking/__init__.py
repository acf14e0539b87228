"""The trackers of a run: TensorBoard, MLflow and Weights & Biases."""
