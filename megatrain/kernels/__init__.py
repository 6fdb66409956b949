"""Operations behind plain functions, each beside its eager reference."""
