"""`python -m shoal.recipes.causal_lm --config run.yaml` trains a config of this recipe."""

if __name__ == "__main__":
    from shoal.cli.recipe import main

    main("causal_lm")
