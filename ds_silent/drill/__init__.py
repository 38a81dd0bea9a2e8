"""The fault drill: ``ds-silent drill``. ``run_drill`` runs it, ``printing`` says what came of it."""
