"""`megatrain port`: the command for megatrain from a launch script or a YAML file of Megatron-LM."""
