import clients  # noqa: F401  so that triton_recommender is found where nothing was installed
