"""Every choice of a deployment as YAML groups, composed by Hydra into one typed, frozen Deployment."""
