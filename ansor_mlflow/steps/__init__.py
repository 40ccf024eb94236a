"""The entry points as functions of their options; here the tuner and MLflow meet. Commands load only what they need."""
