"""The fault drill: ``ds-silent drill``. ``program`` runs it, ``report`` says what came of it."""
