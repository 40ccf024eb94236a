"""Models of single operators, and TVM's results for them beside ONNX Runtime's."""
